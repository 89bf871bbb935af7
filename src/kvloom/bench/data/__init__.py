"""Moving state: what tiers, checksums and codecs reach of plain copies and plain direct I/O, all in one run."""
