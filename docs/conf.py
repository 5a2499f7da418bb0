"""The book: `make docs` builds docs/ as HTML with Sphinx and MyST; a broken link or reference is an error."""

from importlib import metadata

project = "Throughline"
author = "The Throughline authors"
copyright = f"{author}, Apache-2.0"
release = metadata.version("throughline")
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # links to #sections resolve, and one that does not is an error
exclude_patterns = ["conf.py", "*.py"]
html_theme = "furo"
html_title = "Throughline"
html_static_path = ["_static"]
html_css_files = ["book.css"]
