"""What does each chapter draw? One module per chapter, from ngpt_core's functions to plotly."""
