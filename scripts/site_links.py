"""Hook of ``mkdocs.yml``: navigation, links as on GitHub, and pages made from the CSVs."""

import os
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import appendix  # noqa: E402

#: Pages at another path on the site: file in the repository -> page.
MOVED = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "develop/contributing.md",
    "CHANGELOG.md": "changes.md",
}
#: CSV -> its page, which is built and not in git.
MEASURED = {f"benchmarks/{name}.csv": f"measurements/{name}.md" for name in appendix.families()}
SOURCES = {page: source for source, page in MOVED.items()}
#: Tab title -> prefixes of its pages' paths, in order.
TABS = {
    "Start": ("index.md", "guide/start.md", "pages.md"),
    "Guides": ("guide/",),
    "Design": ("design/",),
    "Kernels": ("kernels/",),
    "Develop": ("develop/contributing.md", "develop/", "changes.md"),
    "Performance": ("performance.md", "evidence.md", "measurements/"),
}
TITLES = {"index.md": "megatron-dsa", "pages.md": "All pages", "changes.md": "Changes"}
#: A relative link, or code, which has no links.
LINK = re.compile(
    r"^```.*?^```$|`[^`\n]*`"
    r"|(?P<image>!?)\[(?P<text>[^]]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)",
    re.M | re.S,
)


def on_config(config):
    """Build the navigation from the links in the index of all pages."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    titles = dict(TITLES)
    for link in LINK.finditer(index):
        if link["path"]:
            page = _page(os.path.normpath(f"docs/{link['path']}"))
            titles.setdefault(page, link["text"][:1].upper() + link["text"][1:])
    titles |= {page: Path(page).stem for page in MEASURED.values()}
    config.nav = []
    for tab, beginnings in TABS.items():
        pages = [page for x in beginnings for page in list(titles) if page.startswith(x)]
        pages = list(dict.fromkeys(pages))
        config.nav.append({tab: [{titles.pop(page): page} for page in pages]})
    return config


def on_files(files, config):
    """Put the pages of :data:`MOVED` and :data:`MEASURED` on the site."""
    files.remove(files.get_file_from_path("README.md"))
    for source, page in MOVED.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for source, page in MEASURED.items():
        text = f"---\nsearch:\n  exclude: true\n---\n{appendix.page(Path(source).stem)}"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite relative links: to pages of the site, copied images, or files of the repository."""
    here = page.file.src_uri
    folder = os.path.dirname(SOURCES.get(here, f"docs/{here}"))

    def rewritten(link: re.Match) -> str:
        if link[0].startswith("`"):  # code; in tables GitHub needs a backslash before |
            return link[0] if link[0].startswith("```") else link[0].replace(r"\|", "|")
        path = os.path.normpath(os.path.join(folder, link["path"]))
        if not (ROOT / path).exists():
            return link[0]  # mkdocs reports it
        anchor = link["anchor"] or ""
        if link["image"] and not path.startswith("docs/"):
            target = f"files/{path}"
            if files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
        elif path in MOVED or path in MEASURED or path.startswith("docs/"):
            target = _page(path)
        elif config.extra["repository"]:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            url = f"{config.extra['repository']}/{kind}/main/{path}"
            return f"[{link['text']}]({url}{anchor})"
        else:
            return link["text"]
        target = os.path.relpath(target, os.path.dirname(here) or ".")
        return f"{link['image']}[{link['text']}]({target}{anchor})"

    return LINK.sub(rewritten, markdown)


def _page(path: str) -> str:
    """Return the page of a file, given relative to the repository."""
    return (MOVED | MEASURED).get(path, path.removeprefix("docs/"))
