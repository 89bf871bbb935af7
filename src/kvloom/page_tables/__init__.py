"""Tables from names to places.  Block tables of running sequences are dense arrays and live in the core."""
