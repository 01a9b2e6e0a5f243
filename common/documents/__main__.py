"""`python -m common.documents`: see `common.documents.rewrite`."""

from common import cli
from common.documents import rewrite

cli.command(rewrite.main)
