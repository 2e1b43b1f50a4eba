"""How does a trained nGPT run in a page, and which model is that?

    live.model("ngpt"), live.model("gpt")     the LanguageModels whose weights the page uses
    live.facts("ngpt")                        the command that trained it, its held-out loss
    live.Look()                               the view, as the output of a cell

pack.py        eight bits per coordinate, and back                          train.py     the script that made the weights
trace.py       what every block did at the last byte of a text              page.py      the view as HTML
still.py       the walk as a still picture
operators.js   the equations for one byte: read this one                    model.js     weights, caches, logits
trace.js       trace.py in the page; map.js: the walk around a byte         drawing.js, view.js, live.css   what the reader sees
"""

from .pack import facts, model
from .page import Look

__all__ = ["Look", "facts", "model"]
