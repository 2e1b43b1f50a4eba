"""How is the site built? ``extension.py`` is the Sphinx extension of ``_config.yml``; ``api.py`` makes the reference, and
``architecture.py`` the tables of files and the places in the source."""
