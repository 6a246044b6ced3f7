"""What is protected, how it is captured, and how it moves between ranks."""
