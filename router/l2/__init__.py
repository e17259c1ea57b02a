"""The store behind the engines that all of them share (L2), read directly: how much of a prompt could be loaded.

resp.py and connection.py speak to the server, key_layout.py and chunk_hash.py know what LMCache calls its chunks,
learned_form.py finds out which of it this store uses, and l2.py is the one to ask.
"""
