"""Cold forms: how the bytes of an object are written smaller for a colder tier, and read back.

``slots`` says what a slot's bytes are; ``forms`` is the door (``encode``, ``decode``); ``fp8`` and ``planes`` are the
compiled loops, ``reference`` says in plain NumPy what they must compute; ``choice`` decides which form pays.
``docs/format.md`` describes every byte.  Nothing here decides what moves, and nothing imports torch.
"""
