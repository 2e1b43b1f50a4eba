"""How does text become batches?

sources.py      where documents come from        corpus.py   the packed folder, opened
tokenizers.py   text to integers and back        loader.py   which tokens each rank sees at each step
packing.py      documents to a folder of tokens  embedded/   the text that comes with the package
"""
