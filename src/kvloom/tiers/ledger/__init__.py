"""Who is there, what needs what, and what goes next: the books of tiers that are not made for speed.

A ``Ledger`` counts bytes and never sees one.  It does nothing by itself and knows no lock: its tier calls it from one
thread at a time.  ``tiers.host`` and ``tiers.disk`` have books of their own, in compiled arrays and in SQLite.
"""

from kvloom.tiers.ledger.drafts import Draft
from kvloom.tiers.ledger.nodes import End, Node
from kvloom.tiers.ledger.order import Order
from kvloom.tiers.ledger.units import PLACE, Accounts, Ledger

__all__ = ["PLACE", "Accounts", "Draft", "End", "Ledger", "Node", "Order"]
