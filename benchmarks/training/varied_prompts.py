"""The later shards' questions: everyday requests of many kinds, put together from lists.

A template's `{word}` is replaced by a random entry of `WORDS[word]`, which may hold such words
itself. `about_texts` asks for work on a given text: a sentence or a paragraph that the model has
just written in answer to something else.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from text_prompts import LANGUAGES, SUBJECTS

if TYPE_CHECKING:
    import random

# How the model's own questions may begin, beside `text_prompts.OPENINGS`.
OPENINGS = r"""I am|I have|I want to|I need|My|We are|My friend|My daughter|Our team|Is it|Are there
Should I|When|Where|Who|Which|Tell me|Help me|Suggest|Recommend|Imagine|Plan|Name|Define|Name ten
Give me a list of|List five|What is the best way to|What happens when|What is the difference between
How many|How much|How long|How can I|How to|Explain how|Explain why|Explain the difference|In simple
Write an email|Write a letter|Write a short|Write a story|Write a SQL query|Write a JavaScript
Write a program|Write a class|Write a bash script|Write a Python function that takes a list
Write a Python function that takes a string|Write a Python function that returns|Implement
Implement a function|Debug this code|Convert|Round|A train|A shop|A farmer|A rectangle|Tom has
Maria buys|There are|Find the sum|Find the area|Evaluate|Simplify|Solve for x|Translate the sentence
Summarize|Summarize this article|Shorten this text|Make this sentence|Correct the grammar|Paraphrase
Complete this Python function:\n\ndef |def count|def is_|def find_|def remove_|def sum_
from typing import List\n\n\ndef |class |import"""
OPENINGS = [line.replace(r"\n", "\n") for line in re.split(r"[|\n]", OPENINGS)]

WORDS = {
    "subject": SUBJECTS,
    "language": [*LANGUAGES, "Dutch"],
    "number": [str(n) for n in range(3, 99)],
    "digit": [str(n) for n in range(2, 13)],
    "hundred": [str(n) for n in range(100, 990, 5)],
    "percent": ["5", "10", "12", "15", "20", "30", "35", "40", "50", "60", "75"],
    "hour": [f"{hour}:{minute:02d}" for hour in range(6, 21) for minute in (0, 10, 20, 25, 45)],
    "few": ["three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve"],
    "name": """Ali|Anna|Ben|Carla|Chen|Clara|David|Elena|Emma|Fatima|Hugo|Ivan|James|Julia|Kofi|Lena
Leo|Lucy|Mark|Maya|Mia|Nina|Noah|Olga|Omar|Paul|Priya|Rosa|Sam|Sara|Tim|Yuki|Zoe""",
    "person": """my boss|my sister|my brother|my best friend|a colleague|my landlord|my teacher
my son|my daughter|my grandfather|my roommate|a customer|my doctor|my aunt|a classmate""",
    "trouble": """always arrives late|never answers messages|borrowed money from me and forgot it
is angry with me|talks too much in meetings|wants to quit school|feels lonely|cannot sleep
forgot my birthday|spends too much time on the phone|is moving to another city|lost the keys
broke my favourite cup|does not like my cooking|is learning to drive|wants a dog|has a cold
wants to lose weight|is afraid of flying|gave me a present I do not like|asks for my notes""",
    "goal": """save money every month|learn to cook|read more books|drink more water|wake up earlier
write a diary|learn the guitar|make new friends|find a part-time job|grow herbs on a balcony
get better at maths|paint my bedroom|bake bread at home|eat less sugar|train for a long bike ride
clean the house faster|use my phone less|start a small shop|improve my handwriting|stay calm
prepare for an exam|remember names|take better photos|speak in front of people|repair a chair""",
    "place": """a beach|a small town|the kitchen|a school|a hospital|an airport|a farm|a museum
an office|a train station|a restaurant|a garden|a supermarket|a hotel|a camping site|a big city""",
    "things": """vegetables|animals that live in water|musical instruments|European countries|sports
board games|kinds of weather|kitchen tools|trees|birds|drinks|school subjects|jobs|inventions
healthy snacks|household chores|colours|hobbies|things to see in {place}|things to do in {place}
means of transport|rules for {place}|winter clothes|programming languages|rivers|famous scientists
breakfast ideas|questions to ask in an interview|ways to relax|gifts for {person}|spices|insects
words that describe {place}|items to buy for a party|items to take to {place}|holidays""",
    "order": ["", "", ", one per line", " in a numbered list", ", with a short reason for each"],
    "event": """a barbecue|a school trip|a wedding|a weekend with children|a week in {place}
a picnic in the park|a house move|a family dinner|a small concert|a book club|a job fair""",
    "how": """change a light bulb|make a cup of tea|wash a car|plant a tree|boil an egg|cook rice
send a parcel|set up a printer|write a CV|iron a shirt|build a snowman|clean a window|make soup
book a hotel|sew on a button|choose a password|back up a computer|bake a cake|fold a paper plane""",
    "pair": """a fruit and a vegetable|a lake and a sea|speed and velocity|a virus and a bacterium
a crocodile and an alligator|an architect and an engineer|tea and coffee|a comet and an asteroid
mass and weight|a novel and a short story|a list and a tuple|a debit card and a credit card
renting and buying a home|a frog and a toad|heat and temperature|RAM and a hard disk|ice and snow
a simile and a metaphor|HTTP and HTTPS|a city and a town|an atom and a molecule""",
    "why": """the sky is blue|leaves fall in autumn|the sea is salty|we yawn|ice floats|cats purr
metal feels cold|bread rises|we have seasons|birds migrate|onions make us cry|planes can fly
the moon changes its shape|iron rusts|we dream|bread goes stale|some people are left-handed""",
    "item": """pencils|apples|books|tickets|bottles|cookies|stamps|chairs|oranges|marbles|eggs
plates|cards|flowers|candles|toys|shirts|bags|sandwiches|stickers""",
    "money": ["dollars", "euros", "pounds"],
    "code": ["Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "Rust", "Ruby"],
    "task": """counts the words in a text|reverses a list|finds the largest of three numbers
checks whether a number is even|removes duplicates from a list|converts Celsius to Fahrenheit
adds up the digits of a number|counts the vowels of a string|sorts a list of names by length
merges two sorted lists|reads a file line by line|returns the average of a list of numbers
checks whether two words are anagrams|finds the second largest number|multiplies two matrices
computes the factorial of a number|finds the common elements of two lists|validates an email address
capitalises every word|returns the last {digit} items of a list|counts how often each letter occurs
splits a list into chunks of {digit}|generates a random password|computes compound interest
checks whether a year is a leap year|prints a triangle of stars|replaces spaces by dashes
finds the shortest word of a sentence|computes the greatest common divisor|flattens a nested list
returns the squares of the numbers up to {number}|rounds each number of a list|parses a date
finds all numbers below {hundred} that {digit} divides|implements a stack|implements binary search
implements a queue with two stacks|computes the distance of two points|groups words by first letter
returns the longest run of equal numbers in a list|swaps the keys and values of a dictionary""",
    "table": """employees(id, name, salary)|books(id, title, year)|students(id, name, grade)
products(id, name, price)|flights(id, origin, destination, price)
sales(id, product, amount, day)""",
    "query": """the {few} rows with the highest last column|the number of rows|all names in order
the average of the last column|the rows whose name begins with A|the rows without a name""",
    "line": """{name} = [n for n in range({number}) if n % {digit} == 0]|x = y if y > {digit} else z
print(sum(i * i for i in range({number})))|a, b = b, a|words = sorted(text.split(), key=len)
total = sum(map(int, str({hundred})))|d = {{k: len(k) for k in names}}|s = s[::-1].strip()
first, *rest = items|pairs = list(zip(names, ages))|flag = any(c.isdigit() for c in text)""",
    "topic": """a broken heater|a refund for {item}|a day off on Friday|a delayed delivery|{event}
a late payment|a meeting at {hour}|the wrong size of a shirt|a reservation for {few} people
a recommendation letter|a lost bag|a new price list|a thank-you for a present|an invitation""",
    "prose": """story|poem|dialogue|fairy tale|diary entry|joke|speech|description|letter|blog post
news report|paragraph|review|product description|song""",
}
WORDS = {
    key: value if isinstance(value, list) else re.split(r"[|\n]", value)
    for key, value in WORDS.items()
}

KINDS = {
    "chat": """{person_} {trouble}. What can I do?
{person_} {trouble}. How should I talk about it?
I want to {goal}, but I have little time. Any ideas?
How can I {goal}?
Give me {few} tips to {goal}.
Make a plan for {few} days to {goal}.
I am planning {event}. What do I need?
Is it a good idea to {goal} with {person}?
What should I know before I go to {place} for the first time?
Hi! I feel a bit tired today. Can you suggest something nice to do in {place}?""",
    "lists": """List {few} {things}{order}.
Name {few} {things}{order}.
Give me {few} examples of {things}{order}.
Give me a shopping list for {event}.
Write a checklist for {event}.
List the steps to {how}.
What are {few} {things} that everybody should know?
What are the steps to {how}? Number them.
List {few} facts about {subject}, one sentence each.
Put these in alphabetical order: {item}, {item}, {item}, {item}.""",
    "maths": """{name} has {number} {item} and gives {digit} to {name}. How many are left?
{name} buys {digit} {item} for {number} {money} each. How much does it cost in all?
A ticket costs {number} {money}. Its price rises by {percent} percent. What is the new price?
A film starts at {hour} and lasts {number} minutes. When does it end? Show each step.
{digit} workers need {number} hours for a job. How long do {digit} workers need?
What is {percent} percent of {hundred}? Explain the steps.
Solve for x: {digit}x - {number} = {hundred}. Show your working.
Solve for y: {digit}y + {digit} = {digit}y + {number}.
The average of {digit}, {number} and {number} is what? Explain.
A circle has a radius of {digit} cm. Find its area and circumference.
A bus drives {hundred} km in {digit} hours. How far does it go in {number} minutes?
{name} is {digit} years older than {name}. Together they are {number}. How old is each of them?
Write {number}/{hundred} as a decimal and as a percentage.
{name} saves {number} {money} a week. After how many weeks are there {hundred} {money}?
A bag holds {digit} red and {digit} blue {item}. What is the probability of drawing a red one?
What is {hundred} divided by {digit}? Give the remainder too.
Is {hundred} divisible by {digit}? Explain how you can tell.""",
    "code": """Write a {code} function that {task}.
Write a {code} function that {task}, and explain how it works.
Write a function in {code} that {task} and add comments.
How do I write a {code} program that {task}?
Write an SQL query for the table {table} that returns {query}.
Explain this line of Python: {line}
What does this print, and why? {line}
Write a regular expression that matches {item} followed by a number.
Write a bash command that lists the {few} largest files of a folder.
Write a {code} class for {item} with {few} methods.""",
    "explain": """What is the difference between {pair}?
Explain the difference between {pair} to a child.
Explain why {why}.
Why is it that {why}? Answer in {few} sentences.
Explain {subject} to a beginner in {few} sentences.
How does one {how}?
What are the advantages and disadvantages of {subject}?
What is the connection between {subject} and {subject}?
Describe {place} to somebody who has never seen one.""",
    "write": """Write a short {prose} about {subject}.
Write a {prose} about {name}, who {trouble}.
Write a {prose} set in {place}.
Write a short email about {topic}.
Write a polite message to {person} about {topic}.
Write the first paragraph of a {prose} about {name} and {name} in {place}.
Write {few} sentences about {subject} and {subject}.
Suggest {few} titles for a {prose} about {subject}.""",
}
REQUESTS = {kind: lines.splitlines() for kind, lines in KINDS.items()}

SENTENCE_REQUESTS = """Translate into {language}: {text}
Translate into {language}: {text}
Translate this sentence to {language}: {text}
How do you say this in {language}? {text}
Rewrite this sentence in a more formal way: {text}
Make this sentence shorter: {text}
Say this in other words: {text}
Write this in the past tense: {text}""".splitlines()
PARAGRAPH_REQUESTS = r"""Summarise in one sentence: {text}
Summarise in {few} sentences: {text}
Summarise this for {person}: {text}
What is the main idea of this text?\n\n{text}
Give the main points of this text as a list.\n\n{text}
Find a title for this text: {text}
Rewrite this in simple words: {text}
Summarise the following text.\n\n{text}
Ask three questions about this text: {text}
Shorten this text:\n\n{text}""".splitlines()
PARAGRAPH_REQUESTS = [line.replace(r"\n", "\n") for line in PARAGRAPH_REQUESTS]


def fill(rng: random.Random, template: str, **given: str) -> str:
    """Replace each `{word}`, and those that its replacement brings; `given` is put in as it is."""

    def word(match: re.Match[str]) -> str:
        name = match[1]
        if name in given:
            return given[name]
        if name.endswith("_"):  # at the beginning of a sentence
            replaced = fill(rng, f"{{{name[:-1]}}}")
            return replaced[0].upper() + replaced[1:]
        return fill(rng, rng.choice(WORDS[name]))

    return re.sub(r"(?<!\{)\{(\w+)\}", word, template).replace("{{", "{").replace("}}", "}")


def everyday_prompt(rng: random.Random) -> str:
    """One request; each kind is as likely as the others."""
    return fill(rng, rng.choice(REQUESTS[rng.choice(list(REQUESTS))]))


def about_texts(rng: random.Random, texts: list[str], count: int) -> list[str]:
    """So many requests about different sentences and paragraphs of the texts."""
    sentences = {one for text in texts for one in re.split(r"(?<=[.?!])\s+", text)}
    found = []
    for parts, fits, requests in (
        (sentences, _is_sentence, SENTENCE_REQUESTS),
        ({one for text in texts for one in text.split("\n\n")}, _is_paragraph, PARAGRAPH_REQUESTS),
    ):
        usable = sorted(filter(fits, parts))
        chosen = rng.sample(usable, min(count // 2, len(usable)))
        found += [fill(rng, rng.choice(requests), text=part) for part in chosen]
    return found


def _is_sentence(text: str) -> bool:
    plain = re.fullmatch(r"[A-Z][A-Za-z0-9 ,;'-]+[.?!]", text)
    return plain is not None and 5 <= len(text.split()) <= 22


def _is_paragraph(text: str) -> bool:
    return (
        text[:1].isalpha()
        and text[-1:] in (".", "!", "?")
        and "\n" not in text
        and 30 <= len(text.split()) <= 130
    )
