"""Of the site: what Markdown and docstrings say in other dialects than MkDocs'."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to files outside of docs/, which a site has not, become their paths.

    (That the files exist is tested, with all other links, by `tests/test_docs.py`.)
    """
    return re.sub(r"\[([^\]]*)\]\(\.\./([^)#]+)[^)]*\)", r"\1 (`\2`)", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Roles of Sphinx in docstrings, as `:class:` before a name, are dropped."""
    return re.sub(r":(?:mod|class|func|meth|data):(?=<code>)", "", html)
