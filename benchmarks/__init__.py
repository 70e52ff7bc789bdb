"""What makes the committed results: networks, peers, measuring, tables. It needs a clone and torchvision."""
