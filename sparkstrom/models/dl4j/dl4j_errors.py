"""What is wrong with a file of DL4J's, and what of it is not imported: one error for each."""

from __future__ import annotations

from sparkstrom.base.errors import UsageError


class NoDl4jNetwork(UsageError):
    """A file that DL4J did not write, or that has been damaged since. ``why`` says where."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return (
            f"{self.path} is no whole network of DL4J's: {self.why}; write it again with"
            " ModelSerializer.writeModel(network, file, true)"
        )


class NotImported(UsageError):
    """Something that DL4J has and sparkstrom does not: ``what``, by name, and a remedy."""

    def __init__(self, path: str, where: str, what: str, remedy: str) -> None:
        super().__init__(path, where, what, remedy)
        self.path, self.where, self.what, self.remedy = path, where, what, remedy

    def __str__(self) -> str:
        return f"{self.path}: {self.where} is not imported: {self.what}; {self.remedy}"
