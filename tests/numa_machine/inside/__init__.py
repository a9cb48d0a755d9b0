"""What runs inside the emulated machine; it prints, and the tests outside judge."""
