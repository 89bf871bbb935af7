"""``verify-model``: proof, on the user's own model, that a hit equals a cold run.

``routing`` observes and pins sparse routers, ``cold`` runs transformers' own caches, ``spread`` compares
transformers with itself, ``state`` compares restored bytes, ``verify`` puts kvloom against the cold runs and
``report`` holds the verdict.  The whole package needs the ``transformers`` extra.
"""
