"""What a model was trained on, as a law and as inventories of software ask it."""
