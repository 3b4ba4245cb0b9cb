"""A software bill of materials: what is installed with nestling, as CycloneDX JSON."""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any


def bill() -> str:
    """Every installed package that nestling needs, directly or not, in the CycloneDX 1.5 form.

    Versions, licenses as the packages state them, and who needs whom. Extras that are not installed
    are left out. The same environment gives the same bytes.
    """
    found: dict[str, Distribution] = {}
    needs: dict[str, set[str]] = {}
    waiting = ["nestling"]
    while waiting:
        name = waiting.pop()
        if name in needs:
            continue
        needs[name] = set()
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        for line in found[name].requires or ():
            needs[name].add(_plain(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]))
        waiting += sorted(needs[name])
    return json.dumps(
        {
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "version": 1,
            "metadata": {"component": _component("nestling", found["nestling"], "application")},
            "components": [_component(n, found[n]) for n in sorted(found) if n != "nestling"],
            "dependencies": [
                {
                    "ref": _address(name, found[name]),
                    "dependsOn": [_address(n, found[n]) for n in sorted(needs[name] & set(found))],
                }
                for name in sorted(found)
            ],
        },
        indent=1,
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _address(name: str, package: Distribution) -> str:
    return f"pkg:pypi/{name}@{package.version.replace('+', '%2B')}"


def _component(name: str, package: Distribution, kind: str = "library") -> dict[str, Any]:
    facts: Any = package.metadata
    address = _address(name, package)
    made = {"type": kind, "bom-ref": address, "name": name, "version": package.version}
    stated = facts.get("License-Expression") or facts.get("License")
    licenses = [{"license": {"name": stated.strip().splitlines()[0][:200]}}] if stated else []
    for line in facts.get_all("Classifier") or () if not licenses else ():
        if line.startswith("License :: "):
            licenses.append({"license": {"name": line.rpartition(" :: ")[2]}})
    return {**made, "purl": address, **({"licenses": licenses} if licenses else {})}
