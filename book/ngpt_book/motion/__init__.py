"""How does a page show what happened during a training run? Stored snapshots, with play, pause, a slider, and images to keep.

    Animation(name, title, labels, panels, words, alt)     the output of a cell; figures/motion.py has those of the book

marks.py       curves that grow, shapes, bars, words; panels and axes        still.py     a frame as SVG, for no JavaScript too
codec.py       arrays as text                                                motion.js    the same elements, moved; the controls
animation.py   all of it as an output of a cell                              gif.js       the animation as a GIF file
"""

from .animation import Animation
from .marks import Axis, Bars, Curve, Panel, Ring, Shape, Words

__all__ = ["Animation", "Axis", "Bars", "Curve", "Panel", "Ring", "Shape", "Words"]
