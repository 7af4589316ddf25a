"""Pages of the site that are made from files outside docs/, as a hook of MkDocs: see `PAGES`.

The notebook is stored with its results, so that a build only converts it.
"""

import base64
import html
import json
import pathlib
import re
import tomllib

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parent.parent
# {live page: page of the site that has a link to it}
BACK = {
    "explain": "autocast",
    "sweep": "experiments",
    "errors": "photographs",
    "recipe": "results",
    "notebook": "notebook",
}
# A word of inline code that fits on a line of a telephone. Browsers would break --config after the hyphens.
WORD = re.compile(r"(?<!\S)\S{2,45}(?!\S)")
# {page of the site: file of the repository}
PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "notebook.md": "examples/mixed_precision.ipynb",
}


def on_config(config: MkDocsConfig) -> None:
    """Gives pages an edit link if pyproject.toml names the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.repo_url = project.get("urls", {}).get("Repository", "")
    config.edit_uri = "edit/main/docs/" if config.repo_url else ""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for page, source in PAGES.items():
        if page == "notebook.md":
            text = notebook(files, config)
        else:  # a link to docs/x.md from the root is a link to x.md here
            text = (ROOT / source).read_text().replace("](docs/", "](")
            for other, target in PAGES.items():
                text = text.replace(f"]({target})", f"]({other})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Shows the begin of README on the start page."""
    begin = (ROOT / "README.md").read_text().partition("<!-- docs/index.md shows this part -->")[2]
    shown = begin.partition("<!-- end of the part -->")[0].replace("](docs/", "](")
    return markdown.replace("<!-- README.md -->", shown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks the words of inline code, which docs/extra.css keeps on one line, and narrow columns."""

    def marked(code: re.Match[str]) -> str:
        words = WORD.sub(r'<span class="word">\g<0></span>', code[1])
        return f"<code>{words}</code>"

    content = content.replace("<th>#</th>", '<th class="number">#</th>')
    return re.sub(r"(?<!</span>)(?<!<pre>)<code>([^<]*)</code>", marked, content)


def on_post_build(config: MkDocsConfig) -> None:
    """Gives the live pages, which are files of their own, a way back to the site."""
    for page in pathlib.Path(config.site_dir, "live").glob("*.html"):
        name = page.stem.partition("_")[0]
        back = f'<nav><a href="../{BACK.get(name, "numerics")}/">← mixedres</a></nav>'
        page.write_text(page.read_text().replace("<body>", f"<body>\n{back}", 1))


def on_post_template(content: str, template_name: str, config: MkDocsConfig) -> str:
    """Adds a link to the page that is shown for a wrong address."""
    if template_name != "404.html":
        return content
    start = re.search('href="([^"]*)"[^>]*md-logo', content)
    text = (
        f'<p>There is no page at this address. <a href="{start[1]}">Start</a> links to all pages.</p>' if start else ""
    )
    return content.replace("404 - Not found</h1>", f"404 - Not found</h1>{text}")


def notebook(files: Files, config: MkDocsConfig) -> str:
    """Returns the notebook as Markdown, and adds its pictures and reports as files beside the page."""
    parts = []
    for number, cell in enumerate(json.loads((ROOT / PAGES["notebook.md"]).read_text())["cells"]):
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
            if "image/png" in data:
                name = f"live/notebook_{number}.png"
                files.append(File.generated(config, name, content=base64.b64decode(data["image/png"])))
                parts.append(f"![A result of the cell above]({name})")
            elif report := re.search('srcdoc="([^"]*)"', data.get("text/html", "")):
                name = f"live/notebook_{number}.html"
                files.append(File.generated(config, name, content=html.unescape(report[1])))
                parts.append(f'<iframe src="../{name}" width="100%" height="1100" title="Report"></iframe>')
            elif "text/markdown" in data:
                parts.append(data["text/markdown"])
            else:
                parts.append(f"```text\n{''.join(output.get('text', ())) or data['text/plain']}\n```")
    return "\n\n".join(parts)
