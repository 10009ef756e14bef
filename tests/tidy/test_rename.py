"""Tests of ``python -m scripts.rename``: it changes code, documents and the corpus of bugs."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.rename import rename

FILES = {
    "sparkstrom/protocol/__init__.py": "from sparkstrom.protocol.leases import Leases\n",
    "sparkstrom/protocol/leases.py": (
        "class Leases:\n    def renew(self):\n        return Leases()\n\n\n"
        "def renew():\n    return made(Leases=1)\n"
    ),
    "sparkstrom/user.py": (
        "from sparkstrom.protocol import leases\nfrom sparkstrom.protocol.leases import Leases\n\n"
        "\ndef use(table: Leases):\n    table.renew()\n    leases.renew()\n    'Leases'\n"
        "    return leases.Leases\n"
    ),
    "tests/test_leases.py": "import sparkstrom.protocol.leases as made\n\nmade.Leases().renew()\n",
    "tests/planted/corpus.toml": (
        '[bug]\nwhy = "Leases"\nfile = "protocol/leases.py"\nin = "Leases.renew"\n'
        'find = "return Leases()"\nreplace = ""\n'
    ),
    "ARCHITECTURE.md": "| leases | `protocol/leases.Leases`, `protocol/leases` |\n",
    "docs/a.md": "`sparkstrom.protocol.leases.Leases` of protocol/leases.py; releases\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_class_rename_changes_code_documents_and_corpus(tree: Path) -> None:
    remaining = rename(tree, "sparkstrom.protocol.leases.Leases", "Table")
    package = (tree / "sparkstrom/protocol/__init__.py").read_text()
    assert package == "from sparkstrom.protocol.leases import Table\n"
    made = (tree / "sparkstrom/protocol/leases.py").read_text()
    assert made.startswith("class Table:\n    def renew(self):\n        return Table()\n")
    assert "made(Leases=1)" in made
    user = (tree / "sparkstrom/user.py").read_text()
    assert "import Table\n" in user
    assert "table: Table" in user
    assert "'Leases'" in user
    assert user.endswith("return leases.Table\n")
    assert "made.Table()" in (tree / "tests/test_leases.py").read_text()
    assert "`protocol/leases.Table`" in (tree / "ARCHITECTURE.md").read_text()
    assert "`sparkstrom.protocol.leases.Table`" in (tree / "docs/a.md").read_text()
    corpus = (tree / "tests/planted/corpus.toml").read_text()
    assert 'in = "Table.renew"\nfind = "return Table()"' in corpus
    assert "sparkstrom/user.py:8: 'Leases'" in remaining


def test_module_rename_changes_code_documents_and_corpus(tree: Path) -> None:
    rename(tree, "sparkstrom.protocol.leases", "sparkstrom.rules.expiry")
    assert not (tree / "sparkstrom/protocol/leases.py").exists()
    assert (tree / "sparkstrom/rules/expiry.py").exists()
    user = (tree / "sparkstrom/user.py").read_text()
    assert "from sparkstrom.rules import expiry as leases\n" in user
    assert "from sparkstrom.rules.expiry import Leases\n" in user
    assert "import sparkstrom.rules.expiry as made" in (tree / "tests/test_leases.py").read_text()
    corpus = (tree / "tests/planted/corpus.toml").read_text()
    assert 'file = "rules/expiry.py"' in corpus
    assert "`rules/expiry.Leases`, `rules/expiry`" in (tree / "ARCHITECTURE.md").read_text()
    assert "rules/expiry.py; releases" in (tree / "docs/a.md").read_text()


def test_method_rename_changes_calls_and_corpus(tree: Path) -> None:
    path = tree / "sparkstrom/protocol/leases.py"
    path.write_text(path.read_text().partition("\n\n\ndef")[0] + "\n")
    user = tree / "sparkstrom/user.py"
    user.write_text(user.read_text().replace("    leases.renew()\n", ""))
    rename(tree, "sparkstrom.protocol.leases.Leases.renew", "extend")
    assert "    def extend(self)" in path.read_text()
    assert "table.extend()" in user.read_text()
    assert 'in = "Leases.extend"' in (tree / "tests/planted/corpus.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("sparkstrom.protocol.none.Leases", "Table", "there is no none"),
        ("sparkstrom.nowhere.Leases", "Table", "no such module"),
        ("sparkstrom.protocol.leases.Lease", "Table", "does not define Lease"),
        ("sparkstrom.protocol.leases.Leases", "renew", "is defined there already"),
        ("sparkstrom.protocol.leases.Leases", "no name", "is not a name in Python"),
        ("sparkstrom.protocol.leases", "sparkstrom.user", "exists already"),
        ("sparkstrom.protocol", "sparkstrom.rules", "is a package"),
    ],
)
def test_impossible_rename_raises_error_and_changes_nothing(
    tree: Path, old: str, new: str, why: str
) -> None:
    """An impossible renaming raises ``ValueError`` with the reason and changes no file."""
    with pytest.raises(ValueError, match=why):
        rename(tree, old, new)
    assert {name: (tree / name).read_text() for name in FILES} == FILES


def test_rename_rejects_name_also_used_for_variable(tree: Path) -> None:
    """A name that is also used for a variable is refused with the line."""
    user = tree / "sparkstrom/user.py"
    user.write_text(user.read_text() + "\n\ndef hide(Leases):\n    return Leases\n")
    before = {name: (tree / name).read_text() for name in FILES}
    with pytest.raises(ValueError, match=r"a variable, too: sparkstrom\.user, line 12"):
        rename(tree, "sparkstrom.protocol.leases.Leases", "Table")
    assert {name: (tree / name).read_text() for name in FILES} == before
