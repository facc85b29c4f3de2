# SPDX-License-Identifier: Apache-2.0
"""The errors a user can meet. Each says where, what was got, what was expected, and what to do."""


class SpecCompileError(Exception):
    """Base of every error that speccompile raises on purpose.

    Args:
        where: the file, recipe key, graph or stage the fault is in.
    """

    exit_code = 1

    def __init__(self, where: str, got: str, expected: str, todo: str) -> None:
        self.where, self.got, self.expected, self.todo = where, got, expected, todo
        super().__init__(f"{where}: got {got}; expected {expected}. {todo}")


class RecipeError(SpecCompileError):
    """The recipe, or an override of it, is wrong."""

    exit_code = 2


class CheckpointError(SpecCompileError):
    """A checkpoint folder is missing, incomplete, truncated or inconsistent."""

    exit_code = 3


class ExportError(SpecCompileError):
    """A model cannot be expressed as a graph."""

    exit_code = 4


class PassError(SpecCompileError):
    """A rewrite found a graph it must not touch, or left one that breaks its promise."""

    exit_code = 5


class BuildError(SpecCompileError):
    """A build stage failed: the backend's compiler, the disk, a child process."""

    exit_code = 6


class BundleError(SpecCompileError):
    """A bundle is missing parts, was tampered with, or does not fit this machine."""

    exit_code = 7


class RuntimeFault(SpecCompileError):
    """A request or an engine failed while decoding."""

    exit_code = 8


class CertificateError(SpecCompileError):
    """A bundle does not decode as its target does: a check of its certificate failed."""

    exit_code = 9


class TooFewDraftsError(CertificateError):
    """No check of a bundle's certificate failed, but one scored too few drafts to say anything."""

    exit_code = 10
