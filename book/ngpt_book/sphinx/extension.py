"""What does the book's site need beyond Jupyter Book, so that it is light and loads nothing from other hosts?

A Sphinx extension, named in ``_config.yml``: a plain ``jupyter-book build book --config _config.yml`` is enough. It

1. tells the notebooks that they run for the book (NGPT_BOOK: no widget state in outputs) and decides whether they run at
   all: NGPT_BOOK_EXECUTE = cache (the default), force, or off (pages from the stored outputs);
2. puts a hash of both packages into the path of the execution cache, which otherwise depends only on the notebooks' code and
   would serve stale results of changed functions;
3. takes the scripts out of the outputs and serves one copy, which loads when a figure comes into view (``../lazy.py``), with
   the part of the installed plotly.js that figures need (``plotly_part.py``); the models in the page (``live``), the
   animations (``motion``) and the questions have a script each, on the pages that show them; where an exercise asks for
   Python, which no page runs, the page says so and offers the notebook;
4. draws formulas while it builds (``mathematics.py``), and leaves out what the theme loads without need (``light.py``);
5. numbers the pages that belong to a chapter, 8.1 under 8, and the figures, page by page;
6. drops the scripts of live kernels (thebe, widgets), which would come from other hosts;
7. finds the repository's address (``address.py``) and builds the Colab buttons from it;
8. keeps a formula and the punctuation around it on one line, and lets printed sentences wrap on narrow screens;
9. loads ``api.py``, which builds the reference from the docstrings, ``architecture.py``, which names places in the source,
   ``social.py``, which writes what a page shows where its address is shared, ``meanings.py``, which explains the symbols of the
   front page and draws the map of the book, and ``symbols.py``, which connects the symbols of equations, sliders and listings.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import plotly
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ConfigError

import ngpt_core

from .. import exercises, lazy, live, reading
from ..motion import animation
from ..questions import page as asked
from . import address, light, mathematics, plotly_part

PACKAGES = (Path(ngpt_core.__file__).parent, Path(__file__).parents[1])
SOURCES = (".py", ".js", ".css", ".cpp", ".h", ".json", ".safetensors")
NUMBER = re.compile(r'(<span class="ngpt-number">)[^<]*(</span>)')
CAPTION = re.compile(
    r'(<span class="ngx-words"[^>]*>|<p class="ngm-(?:words|caption)">)(.*?)(</span> <span class="ngx-save">|</p>)'
)
INDEXED = re.compile(r"\b(alpha|[A-Za-z])_([A-Za-z]+)\b")  # s_z, alpha_A
COLAB = "https://colab.research.google.com/github"


def package_hash() -> str:
    """Changes with any source file of ngpt_core or ngpt_book, and with the Python and plotly that run it."""
    digest = hashlib.sha1(f"{sys.version_info[:2]} {plotly.__version__}".encode())
    for package in PACKAGES:
        for path in sorted(p for p in package.rglob("*") if p.suffix in SOURCES):
            digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def configure(app: Sphinx, config) -> None:
    os.environ["NGPT_BOOK"] = "1"  # inherited by the kernels
    mode = os.environ.get("NGPT_BOOK_EXECUTE") or config.nb_execution_mode
    if mode not in ("cache", "force", "off"):
        raise ConfigError(f"NGPT_BOOK_EXECUTE must be cache, force or off; got {mode!r}.")
    config.nb_execution_mode = mode
    config.html_math_renderer = "built"
    config.nb_code_prompt_show, config.nb_code_prompt_hide = "Show the code", "Hide the code"
    config.nb_execution_cache_path = str(Path(app.outdir).parent / ".jupyter_cache" / package_hash())
    # The theme does not know placeholders: it gets the address, and shows its buttons, only once it is a real one.
    options = config.html_theme_options
    config.ngpt_repository = address.address(options.get("repository_url", ""))
    real = address.is_real(config.ngpt_repository)
    options |= {"use_repository_button": real, "use_issues_button": real, "repository_url": config.ngpt_repository}
    if not real:
        options.pop("repository_url")


def copy_files(app: Sphinx) -> None:
    """Write the scripts and styles into the site; third-party ones come from installed packages, none is in the repository."""
    static = Path(app.outdir) / "_static"
    static.mkdir(parents=True, exist_ok=True)
    mathematics.copy_files(static)
    texts = {"plotly-part.js": plotly_part.part()}
    texts |= {f"{part.name}.js": part.script(book=True) for part in lazy.PARTS.values()}
    app.config.ngpt_files = {name: f"{name}?v={hashlib.sha1(text.encode()).hexdigest()[:8]}" for name, text in texts.items()}
    texts |= {f"{part.name}.css": part.css.read_text(encoding="utf-8") for part in lazy.PARTS.values()}
    texts |= {"lazy.js": lazy.LOADER.read_text(encoding="utf-8"), "live.js": live.page.script()}
    texts |= {"motion.js": animation.script(), "motion.css": animation.style()}
    texts |= {"questions.js": asked.script(book=True), "questions.css": asked.style()}
    for name, text in texts.items():
        (static / name).write_text(text, encoding="utf-8")
    (static / "icons.css").write_text("", encoding="utf-8")  # written again when it is known which icons there are
    (static / "live").mkdir(exist_ok=True)
    for name, text in live.pack.scripts():
        (static / "live" / name).write_text(text, encoding="ascii")


def take_out_bundles(app: Sphinx, doctree: nodes.document) -> None:
    """Remove the script copies from the outputs, and note which parts of the book draw on the page."""
    patterns = {name: lazy.bundles(name) for name in lazy.PARTS}
    patterns |= {"ngl": live.page.BUNDLE, "ngm": animation.BUNDLE, "ngq": asked.BUNDLE}
    for node in doctree.findall(nodes.raw):
        before = text = node.astext()
        for name, bundle in patterns.items():
            if f'class="{name}"' in text:
                text = bundle.sub("", text)
                app.env.metadata[app.env.docname][name] = True
        if (text := mathematics.in_outputs(text)) != before:
            node.children = [nodes.Text(text)]
            node.rawsource = text


def _pages_of_chapters(app: Sphinx, env) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(page, its number, such as (8, 1)) of the pages under a chapter."""
    for page, number in reading.numbers(Path(app.srcdir) / "_toc.yml").items():
        if "." in number and page in env.titles:
            yield page, tuple(map(int, number.split(".")))


def forget_numbers(app: Sphinx, env) -> list[str]:
    """Take back what ``number_pages`` gave in an earlier build: Sphinx's own numbers would stumble over it."""
    for page, _ in _pages_of_chapters(app, env):
        for place in (env.titles[page], next(env.tocs[page].findall(nodes.reference))):
            place.attributes.pop("secnumber", None)
    return []  # no page changes by that


def number_pages(app: Sphinx, env) -> list[str]:
    """Give the pages under a chapter numbers like 8.1. Sphinx would number the sections of every page with them."""
    changed = []
    for page, parts in _pages_of_chapters(app, env):
        title, *sections = env.tocs[page].findall(nodes.reference)
        found = {title["anchorname"]: parts, **{section["anchorname"]: None for section in sections}}
        if env.toc_secnumbers.get(page) != found:
            env.toc_secnumbers[page] = found
            changed.append(page)
        env.titles[page]["secnumber"] = title["secnumber"] = parts
    return changed


def number_figures(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Fill the places for numbers: the third figure of chapter 5 is Figure 5.3. Symbols of captions get their index."""
    chapter = app.env.toc_secnumbers.get(docname, {}).get("", ())
    before = ".".join(map(str, [*chapter, ""]))
    count = 0

    def numbered(place: re.Match) -> str:
        nonlocal count
        count += 1
        return f"{place[1]}Figure {before}{count}.{place[2]}"

    def spelled(symbol: re.Match) -> str:
        return f"{symbol[1].replace('alpha', 'α')}<sub>{symbol[2]}</sub>"

    for node in doctree.findall(nodes.raw):
        if "ngpt-number" in (text := node.astext()):
            text = NUMBER.sub(numbered, text)
            text = CAPTION.sub(lambda caption: caption[1] + INDEXED.sub(spelled, caption[2]) + caption[3], text)
            node.children, node.rawsource = [nodes.Text(text)], text


def offer_python(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Where an exercise's answer is Python, replace the verdict on its stub, which the page cannot run again, by two ways to
    run it: Colab, and the notebook to download."""
    for node in list(doctree.findall(nodes.literal_block)):
        if exercises.UNWRITTEN in node.astext():
            source = f"{docname}.ipynb"
            note = exercises.offer(colab_address(app, docname), f"{'../' * docname.count('/')}_sources/{source}")
            node.parent.replace(node, nodes.raw("", note, format="html"))
            app.env.metadata[docname]["ngq"] = True


def drop_kernels(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Remove thebe's settings, like its scripts: no page starts a remote kernel."""
    for node in list(doctree.findall(nodes.raw)):
        if "x-thebe-config" in node.astext():
            node.parent.remove(node)


def keep_together(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Keep a browser from breaking a line between a formula or name and the comma after it or the parenthesis before it."""
    for node in list(doctree.findall(lambda n: isinstance(n, nodes.math | nodes.literal))):
        if isinstance(node, nodes.literal) and (len(node.astext()) > 30 or " " in node.astext()):
            continue  # a long one must be able to break
        if isinstance(node.parent, nodes.reference) and len(node.parent) == 1:
            node = node.parent
        parent, group = node.parent, [node]
        i = parent.index(node)
        before, after = parent[i - 1] if i else None, parent[i + 1] if i + 1 < len(parent) else None
        if isinstance(after, nodes.Text) and (close := re.match(r"[^\s\w(\[]\S*", after)):
            parent[i + 1] = nodes.Text(after[close.end() :])  # by index: another text may be equal to it
            group.append(nodes.Text(close[0]))
        if isinstance(before, nodes.Text) and (opened := re.search(r"[(\[]+$", before)):
            parent[i - 1] = nodes.Text(before[: opened.start()])
            group.insert(0, nodes.Text(opened[0]))
        if len(group) > 1:
            parent.replace(node, nodes.inline("", "", *group, classes=["together"]))


def wrap_sentences(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Let an output of one line, a sentence, wrap; one of several lines may be a table, and scrolls."""
    for node in doctree.findall(nodes.literal_block):
        if "stream" in node["classes"] and "\n" not in node.astext().strip():
            node["classes"].append("sentence")


def _foreign(script) -> bool:
    name = getattr(script, "filename", None) or str(script)
    body = (getattr(script, "attributes", None) or {}).get("body") or ""
    return any(word in name for word in ("thebe", "require.min.js", "embed-amd")) or "THEBE_JS_URL" in body


def page_scripts(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    for files in (context["script_files"], context["css_files"]):
        files[:] = [f for f in files if not _foreign(f)]  # in place: the builder appends to the same list
    app.add_css_file("mathematics.css")
    app.add_css_file("icons.css")
    marks = app.env.metadata.get(pagename, {})
    if parts := [name for name in lazy.PARTS if name in marks]:
        for name in parts:
            app.add_css_file(f"{name}.css")
        app.add_js_file(None, body="document.documentElement.classList.add('ngpt-js')", priority=100)
        files = {n: address for n, address in app.config.ngpt_files.items() if n[:-3] in parts or n == "plotly-part.js"}
        app.add_js_file("lazy.js", loading_method="defer", priority=900, **{"data-files": json.dumps(files)})
    if "ngl" in marks:
        app.add_js_file("live.js", loading_method="defer", priority=901)
    for name, part in (("ngm", "motion"), ("ngq", "questions")):
        if name in marks:
            app.add_css_file(f"{part}.css")
            app.add_js_file(f"{part}.js", loading_method="defer", priority=902)


def colab_url(repository: str, branch: str, path: str) -> str:
    """The address at which Colab opens a notebook of a repository.

    >>> colab_url("https://github.com/owner/name", "main", "book/01.ipynb")
    'https://colab.research.google.com/github/owner/name/blob/main/book/01.ipynb'
    """
    parts = urlparse(repository)
    place = parts.path if parts.hostname == "github.com" else f"/{parts.hostname}{parts.path}"
    return f"{COLAB}{place}/blob/{branch}/{path}"


def colab_address(app: Sphinx, docname: str) -> str:
    options = app.config.html_theme_options
    return colab_url(app.config.ngpt_repository, options["repository_branch"], f"{options['path_to_docs']}/{docname}.ipynb")


def colab_button(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Add a Colab button. Jupyter Book's accepts only a github.com address, which the placeholder is not."""
    if doctree is None or not app.env.doc2path(pagename).endswith(".ipynb"):
        return
    url = colab_address(app, pagename)
    context["header_buttons"].append(
        {"type": "link", "text": "", "tooltip": "Run in Colab", "icon": "fas fa-rocket", "url": url, "label": "colab"}
    )


def setup(app: Sphinx) -> dict:
    app.setup_extension("ngpt_book.sphinx.api")
    app.setup_extension("ngpt_book.sphinx.architecture")
    app.setup_extension("ngpt_book.sphinx.social")
    app.setup_extension("ngpt_book.sphinx.meanings")
    app.setup_extension("ngpt_book.sphinx.symbols")
    app.add_config_value("ngpt_repository", "", "html")
    app.add_config_value("ngpt_files", {}, "")
    mathematics.install(app)
    app.connect("config-inited", configure, priority=100)
    app.connect("builder-inited", copy_files)
    app.connect("doctree-read", take_out_bundles)
    app.connect("doctree-resolved", offer_python, priority=900)
    app.connect("doctree-resolved", drop_kernels, priority=900)
    app.connect("doctree-resolved", keep_together, priority=900)
    app.connect("doctree-resolved", wrap_sentences, priority=900)
    app.connect("env-get-updated", forget_numbers, priority=100)  # before Sphinx's own numbers
    app.connect("env-get-updated", number_pages, priority=900)  # after Sphinx's own numbers
    app.connect("doctree-resolved", number_figures, priority=900)
    app.connect("build-finished", light.lighten)
    app.connect("html-page-context", page_scripts, priority=900)
    app.connect("html-page-context", colab_button, priority=700)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
