"""What tests of models on several ranks need: toy models, arguments, test cases."""
