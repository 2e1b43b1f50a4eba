"""What of the book can be printed? The whole book as one PDF (``whole.py``), and the recipe on one page (``card.py``)."""
