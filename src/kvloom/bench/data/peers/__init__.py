"""Drivers of other tiers.  Their own Python runs them; nothing here is imported by kvloom itself."""
