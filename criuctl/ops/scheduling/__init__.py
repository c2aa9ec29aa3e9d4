"""Operations at fixed times, and on several sessions and configured trees."""
