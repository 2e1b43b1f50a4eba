"""The book's figures: drawn by plotly from ngpt_core's own functions, alive on a page without a kernel."""

from .exercises import check
from .explorer import Explorer
from .page import show
from .slider import Slider
from .theme import COLORS, DIVERGING, SEQUENTIAL, TEMPLATE

__all__ = ["COLORS", "DIVERGING", "SEQUENTIAL", "TEMPLATE", "Explorer", "Slider", "check", "show"]
