"""Makes one HTML page of a run, or of two side by side.

python page.py pytorch_profiles
python page.py profile_a.json profile_b.json --output two.html
python page.py trace.json --output report.md
"""

from tracepage.command_line import require

require(
    ("jinja2", "matplotlib", "pandas", "pydantic"),
    "run `make setup`, or `pip install .`, in this folder",
)

from tracepage import page

if __name__ == "__main__":
    page.command()
