"""Loads PyTorch, which takes seconds, and says so. `common.cli` imports it before what needs PyTorch."""

import importlib

from common.progress import progress

with progress("loading PyTorch"):
    importlib.import_module("torch")
