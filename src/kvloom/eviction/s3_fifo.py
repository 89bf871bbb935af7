"""S3-FIFO over leaves: a small queue for what is new, a main queue for what was used again.

Leaves of the small queue go first while it has at least a tenth of all leaves.  One that was used twice since it came
goes on to the main queue instead; there it stays one more round for each use, at most three.  What comes back while
the index still remembers it goes straight to the main queue.  For many prompts that come once; not for conversations,
where what was not used yet is what will be.
"""

from kvloom.core.policies import Order
from kvloom.eviction.policy import EvictionPolicy

S3_FIFO = EvictionPolicy("s3-fifo", order=Order.FIFO)
