"""``kvloom bench core``: what the metadata work of a request costs, alone and beside other cache managers."""
