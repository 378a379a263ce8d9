"""What the stacks of a trained model do, and what happens to the loss when they are disturbed."""
