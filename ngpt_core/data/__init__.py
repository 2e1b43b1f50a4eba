"""How does text become batches?

sources.py      where documents come from        corpus.py     the packed folder, opened
tokenizers.py   text to integers and back        verified.py   which of its files need not be read again
packing.py      documents to a folder of tokens  loader.py     which tokens each rank sees at each step
embedded/       the text that comes with the package
"""
