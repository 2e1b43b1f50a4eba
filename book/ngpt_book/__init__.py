"""What does the book need beyond the trainer? Explorers, figures, stored results, and a Sphinx extension.

from ngpt_book import Explorer, Slider, show, check

explorer/    a figure with sliders that works on a page without a kernel      figures/   what each chapter draws
data/        stored results, each beside the script that makes it             sphinx/    the extension that builds the site
live/        a trained nGPT and its GPT twin that run in a page                motion/    training animations: play, pause, save
questions/   what a page asks, and how it answers
theme.py     colors and the plotly template                                   exercises.py   checks the reader's answers
lazy.py      code that loads when a figure comes into view (lazy.js)
source.py    which module imports which, and where a name is defined
"""

from importlib.util import find_spec

if find_spec("plotly") is None:
    raise ImportError('ngpt_book draws with plotly, which is not installed: pip install "ngpt-core[notebook]"')

from . import live as live
from .exercises import check
from .explorer.explorer import Explorer
from .explorer.page import show
from .explorer.slider import Slider
from .theme import COLORS, DIVERGING, SEQUENTIAL, TEMPLATE

__all__ = ["COLORS", "DIVERGING", "SEQUENTIAL", "TEMPLATE", "Explorer", "Slider", "check", "show"]
