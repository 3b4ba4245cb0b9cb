"""Hashes of the pinned packages: `hashes.txt`, made from constraints.txt and a package index.

    python .ci/hashes.py --write [--wheels FOLDER]    # asks the index about pins that are new
    python .ci/hashes.py                              # every pin has its hashes: exit code 0

    pip install --require-hashes --no-deps -r hashes.txt && pip install --no-deps -e .

pip takes no hashes for an editable install, so constraints.txt itself stays without them: the
packages are installed by hash first, then the package. Every file of a version that the index
offers for Python 3.11 is listed, for all systems. On Linux torch is the wheel for CPUs (2.13.0+cpu)
alone, from FOLDER or from `--extra-index-url https://download.pytorch.org/whl/cpu`: the one on PyPI
asks for NVIDIA's packages, which are not pinned here, and pip would prefer it if both were listed.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import re
import sys
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).parents[1]
INDEX = "https://pypi.org/simple/"
HEAD = "# Made by `python .ci/hashes.py --write`; see there how it is used.\n"


def plain(name: str) -> str:
    """A project's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """name -> version of a requirements file."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", text, re.MULTILINE)
    return {plain(name): version for name, version in found}


def hashes(text: str) -> dict[str, set[str]]:
    """name -> SHA-256 sums of a requirements file."""
    found: dict[str, set[str]] = {}
    name = ""
    for line in text.splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==", line):
            name = plain(match[1])
        found.setdefault(name, set()).update(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line))
    return found


def is_of(file: str, name: str, version: str) -> bool:
    """Whether a file is of this version and for this Python; +cpu and the like may follow."""
    stem = file.removesuffix(".tar.gz").removesuffix(".zip")
    if file.endswith(".whl"):
        project, found, *_, python, binary, _ = file.split("-")
        fits = {"py3", "cp311"} & set(python.split(".")) or binary == "abi3"
        return bool(fits) and plain(project) == name and found.partition("+")[0] == version
    return plain(stem) == plain(f"{name}-{version}")


def listed(name: str, version: str) -> set[str]:
    """The sums of all files the index has of a version."""
    with urllib.request.urlopen(f"{INDEX}{name}/", timeout=120) as answer:
        page = answer.read().decode()
    found = set()
    for link in re.findall(r'<a [^>]*href="([^"]+)"', page):
        address, sum_ = urldefrag(html.unescape(link))
        if sum_.startswith("sha256=") and is_of(unquote(address.rsplit("/", 1)[1]), name, version):
            found.add(sum_.removeprefix("sha256="))
    return found


def entry(name: str, version: str, wheels: Path | None) -> str:
    """The lines of one package; a wheel of one's own with a local version stands alone on Linux."""
    sums = listed(name, version)
    own = [p for p in wheels.glob("*.whl") if is_of(p.name, name, version)] if wheels else []
    local = {hashlib.sha256(path.read_bytes()).hexdigest() for path in own}
    if not sums:
        raise SystemExit(f"the index has no file of {name}=={version}")
    if not local:
        return _lines(f"{name}=={version}", sums)
    linux = "sys_platform == 'linux'"
    return _lines(f"{name}=={version} ; {linux}", local) + _lines(
        f"{name}=={version} ; {linux.replace('==', '!=')}", sums
    )


def _lines(what: str, sums: set[str]) -> str:
    return what + "".join(f" \\\n    --hash=sha256:{one}" for one in sorted(sums)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="ask the index and write the file")
    parser.add_argument("--anew", action="store_true", help="ask for versions already listed too")
    parser.add_argument("--wheels", type=Path, help="folder with further wheels")
    given = parser.parse_args()
    path = ROOT / "hashes.txt"
    if given.write:
        old = path.read_text() if path.exists() and not given.anew else ""
        entries = []
        for name, version in pins((ROOT / "constraints.txt").read_text()).items():
            own = re.escape(f"{name}=={version}")
            kept = re.findall(rf"^{own} .*\n(?:    --hash=.*\n)+", old, re.MULTILINE)
            entries.append("".join(kept) or entry(name, version, given.wheels))
        path.write_text(HEAD + "".join(entries))
    text = path.read_text()
    wanted, found = pins((ROOT / "constraints.txt").read_text()), pins(text)
    wrong = sorted(set(wanted.items()) ^ set(found.items()))
    wrong += [(name, "no hash") for name, sums in hashes(text).items() if name and not sums]
    print(f"{len(found)} pins, {sum(map(len, hashes(text).values()))} hashes, {len(wrong)} wrong",
          *wrong[:5], *(["(`make hashes` mends it)"] if wrong else []))  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
