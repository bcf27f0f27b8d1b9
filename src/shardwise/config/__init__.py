"""What a user may say: schema, strict loading, rules, reference."""
