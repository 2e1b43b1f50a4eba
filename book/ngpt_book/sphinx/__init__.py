"""How is the site built? ``extension.py`` is the Sphinx extension of ``_config.yml``; ``api.py`` makes the reference."""
