"""What do the commands other than ``ngpt train`` do?

plan.py       ngpt plan        report.py, figures.py, theme.py   ngpt report       demo.py   ngpt demo
simulate/     ngpt simulate
evaluate.py   ngpt eval        generate.py                       ngpt generate     selftest.py   ngpt selftest
"""
