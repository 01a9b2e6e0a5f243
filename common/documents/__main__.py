"""Rewrites the generated tables and pictures of all documents; see `common.documents.rewrite`."""

from common import cli
from common.documents import rewrite

cli.command(rewrite.main)
