"""Where clients run: in this process and its workers (`local`), or on Flower's nodes."""
