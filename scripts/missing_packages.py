"""Prints which of the project's packages this Python lacks, one a line; exit 1 if any. Standard library alone.

Usage: python missing_packages.py [--extra NAME …] [--gpu]. The list is pyproject.toml's; --gpu asks for a CUDA plugin
of JAX too. Nothing is imported, so that a launcher can ask at every start.
"""

import argparse
import importlib.metadata
import importlib.util
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator

# Distributions whose module is called otherwise; the others: lower case, "-" as "_".
_MODULES = {
    "orbax-checkpoint": "orbax",
    "pillow": "PIL",
    "pytest-xdist": "xdist",
    "pyyaml": "yaml",
    "tensorboardx": "tensorboardX",
}
_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def missing(extras: list[str], gpu: bool) -> Iterator[str]:
    """Yields the requirement and, where another release is there, which."""
    pyproject = pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    for requirement in requirements:
        match = re.fullmatch(r"([A-Za-z0-9_-]+)(?:\[.*\])?(>=|==)([0-9.]+)", requirement)
        assert match, f"pyproject.toml: {requirement} is not of the form name>=version"
        name, operator, wanted = match.groups()
        found = _version(name)
        if found is None:
            yield requirement
        elif _key(found) < _key(wanted) or (operator == "==" and _key(found) != _key(wanted)):
            yield f"{requirement} (found {found})"
    if gpu and not any(_version(plugin) for plugin in _CUDA_PLUGINS):
        yield "jax[cuda13] or jax[cuda12]"


def _version(distribution: str) -> str | None:
    """The installed release, or None where its record or its module is not there."""
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution in _CUDA_PLUGINS:
        return version
    module = _MODULES.get(distribution.lower(), distribution.lower().replace("-", "_"))
    return version if importlib.util.find_spec(module) else None


def _key(version: str) -> tuple[int, ...]:
    """The leading numbers of a release; enough for the releases that the packages here make."""
    numbers = [int(n) for n in re.match(r"[0-9.]*", version)[0].strip(".").split(".") if n]  # type: ignore[index]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def main() -> int:
    """Prints what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml to ask for too")
    parser.add_argument("--gpu", action="store_true", help="ask for a CUDA plugin of JAX too")
    arguments = parser.parse_args()
    names = list(missing(arguments.extra, arguments.gpu))
    print("\n".join(names), end="\n" if names else "")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
