"""Images in prompts: decoding, preprocessing, vision towers, and what an image changes about a prompt's tokens.

`image.py` decodes what clients send. The processor of a family (`families.py`) resizes it to what its tower takes, and says
which tokens stand for it: an `ImageSpan`. `ImageEncoder` runs the tower, `PromptImages` gives its output to the language model.
"""
