"""How does a figure respond to sliders on a page without a kernel?

explorer.py   the object, its grid of answers          page.py     the HTML around it          explorer.js, *.js, explorer.css
slider.py     one parameter and its values             grid.py     arrays as compact text      widget.py   with a kernel
binding.py    which part of a figure follows which array           svg/        the still picture, for pages without scripts
"""
