"""Makes one HTML page of a run, or of two side by side.

python page.py pytorch_profiles
python page.py profile_a.json profile_b.json --output two.html
"""

from common.documents import page

if __name__ == "__main__":
    page.command()
