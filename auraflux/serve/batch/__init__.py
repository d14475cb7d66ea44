"""Batches: requests from a file, run through the same application as those over HTTP, with their responses on disk.

`lines.py` reads requests, `journal.py` stores responses so that none is lost or doubled, `work.py` runs them; `file_store.py`,
`batches.py` and `routes.py` are OpenAI's Files and Batch APIs.
"""
