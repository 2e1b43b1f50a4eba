"""The book's figures: drawn by plotly from ngpt_core's own functions, alive on a page without a kernel."""

from .exercises import check
from .explorer import Explorer, Slider
from .page import show
from .theme import COLORS, DIVERGING, SEQUENTIAL, TEMPLATE

__all__ = ["COLORS", "DIVERGING", "SEQUENTIAL", "TEMPLATE", "Explorer", "Slider", "check", "show"]
