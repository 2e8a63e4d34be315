"""A link checker for a folder of HTML pages: every relative link must lead to a file there, every fragment to an element.

python -m tests.support.links out/docs
"""

import functools
import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    """The links of a page, and its elements that can be linked to."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            if name in ("href", "src") and value:
                self.targets.append(value)


read_page = functools.lru_cache(maxsize=1000)(Page)


def broken_links(site: pathlib.Path) -> list[str]:
    """One line per broken link of the pages in a folder. Links to other hosts are not followed."""
    site = site.resolve()
    return [
        f"{path.relative_to(site)}: {target}: {problem}"
        for path in sorted(site.rglob("*.html"))
        for target in read_page(path).targets
        if (problem := _problem(site, path, target))
    ]


def _problem(site: pathlib.Path, path: pathlib.Path, target: str) -> str | None:
    url = urllib.parse.urlsplit(target)
    if url.scheme or url.netloc:
        return None
    file = path if not url.path else (path.parent / urllib.parse.unquote(url.path)).resolve()
    if file.is_dir():
        file = file / "index.html"
    if not file.is_relative_to(site) or not file.is_file():
        return "no such file in the site"
    anchor = urllib.parse.unquote(url.fragment)
    if anchor and file.suffix == ".html" and anchor not in read_page(file).anchors:
        return "no such element in the page"
    return None


def main() -> int:
    site = pathlib.Path(sys.argv[1])
    broken = broken_links(site)
    num_pages = len(list(site.rglob("*.html")))
    print(*broken, f"{len(broken)} broken links in {num_pages} pages of {site}", sep="\n")
    return 1 if broken or not num_pages else 0


if __name__ == "__main__":
    sys.exit(main())
