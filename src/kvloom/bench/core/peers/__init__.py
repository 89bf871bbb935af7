"""Drivers of other cache managers.  Their own Python runs them; nothing here is imported by kvloom itself."""
