"""Tables and pictures in the documents, made from formulas and from the files in results/ by
`python -m documents`.
"""
