"""The ways of training many models that are compared; ``table.WAYS`` lists them."""
