"""Hashes of the pinned packages: `hashes.txt`, made from constraints.txt and a package index.

    python .ci/hashes.py --write [--wheels FOLDER]    # asks the index; FOLDER: wheels of one's own
    python .ci/hashes.py                              # every pin has its hashes: exit code 0

    pip install --require-hashes --no-deps -r hashes.txt && pip install --no-deps -e .

pip takes no hashes for an editable install, so constraints.txt itself stays without them: the
packages are installed by hash first, then the package. Every file of a version that the index
offers for Python 3.11 is listed, for all systems. torch is also listed with the wheel for CPUs
alone (2.13.0+cpu), which comes from an index of its own and needs none of NVIDIA's packages: those
that the wheel on PyPI asks for are not pinned here.
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
            found[name] = set()
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


def write(wheels: Path | None) -> str:
    """The text of hashes.txt."""
    lines = [HEAD]
    for name, version in pins((ROOT / "constraints.txt").read_text()).items():
        sums = listed(name, version)
        for path in sorted(wheels.glob("*.whl")) if wheels else ():
            if is_of(path.name, name, version):
                sums.add(hashlib.sha256(path.read_bytes()).hexdigest())
        if not sums:
            raise SystemExit(f"the index has no file of {name}=={version}")
        each = "".join(f" \\\n    --hash=sha256:{one}" for one in sorted(sums))
        lines.append(f"{name}=={version}{each}\n")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="ask the index and write the file")
    parser.add_argument("--wheels", type=Path, help="folder with further wheels")
    given = parser.parse_args()
    path = ROOT / "hashes.txt"
    if given.write:
        path.write_text(write(given.wheels))
    text = path.read_text()
    wanted, found = pins((ROOT / "constraints.txt").read_text()), pins(text)
    wrong = sorted(set(wanted.items()) ^ set(found.items()))
    wrong += [(name, "no hash") for name, sums in hashes(text).items() if name and not sums]
    print(f"{len(found)} pins, {sum(map(len, hashes(text).values()))} hashes, {len(wrong)} wrong",
          *wrong[:5])  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
