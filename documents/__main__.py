"""Rewrites the generated tables and pictures of all documents; see `documents.rewrite`."""

from common import cli
from documents import rewrite

cli.command(rewrite.main)
