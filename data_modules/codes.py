"""Lists column names, codes and ranges from the documentation of the tables in `data_modules.benchmark_tables`."""

from __future__ import annotations

Categories = dict[str, tuple[str, ...]]
Ranges = dict[str, tuple[float, float]]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADULT_COLUMNS = _words(
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    "capital-gain capital-loss hours-per-week native-country"
)

ADULT_CATEGORIES: Categories = {
    "workclass": _words(
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked"
    ),
    "education": _words(
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters "
        "1st-4th 10th Doctorate 5th-6th Preschool"
    ),
    "marital-status": _words(
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse"
    ),
    "occupation": _words(
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
        "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv "
        "Armed-Forces"
    ),
    "relationship": _words("Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    "race": _words("White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    "sex": _words("Female Male"),
    "native-country": _words(
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India Japan "
        "Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal "
        "Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua "
        "Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands"
    ),
}

NURSERY_CATEGORIES: Categories = {
    "parents": ("usual", "pretentious", "great_pret"),
    "has_nurs": ("proper", "less_proper", "improper", "critical", "very_crit"),
    "form": ("complete", "completed", "incomplete", "foster"),
    "children": ("1", "2", "3", "more"),
    "housing": ("convenient", "less_conv", "critical"),
    "finance": ("convenient", "inconv"),
    "social": ("nonprob", "slightly_prob", "problematic"),
    "health": ("recommended", "priority", "not_recom"),
}

GERMAN_COLUMNS = _words(
    "checking duration history purpose amount savings employment installment_rate personal_status debtors "
    "residence_since property age other_plans housing credits job liable_people telephone foreign_worker"
)


def _german(attribute: int, first: int, last: int) -> tuple[str, ...]:
    return tuple(f"A{attribute}{code}" for code in range(first, last + 1))


GERMAN_CATEGORIES: Categories = {
    "checking": _german(1, 1, 4),
    "history": _german(3, 0, 4),
    "purpose": _german(4, 0, 10),
    "savings": _german(6, 1, 5),
    "employment": _german(7, 1, 5),
    "personal_status": _german(9, 1, 5),
    "debtors": _german(10, 1, 3),
    "property": _german(12, 1, 4),
    "other_plans": _german(14, 1, 3),
    "housing": _german(15, 1, 3),
    "job": _german(17, 1, 4),
    "telephone": _german(19, 1, 2),
    "foreign_worker": _german(20, 1, 2),
}

HOSPITAL_RANGES: Ranges = {
    "time_in_hospital": (1, 14),
    "num_lab_procedures": (0, 150),
    "num_procedures": (0, 6),
    "num_medications": (0, 100),
    "number_outpatient": (0, 50),
    "number_emergency": (0, 100),
    "number_inpatient": (0, 30),
    "number_diagnoses": (0, 20),
}
_DOSES = _words("No Steady Up Down")
_DRUGS = _words(
    "metformin repaglinide nateglinide chlorpropamide glimepiride acetohexamide glipizide glyburide tolbutamide "
    "pioglitazone rosiglitazone acarbose miglitol troglitazone tolazamide examide citoglipton insulin "
    "glyburide-metformin glipizide-metformin glimepiride-pioglitazone metformin-rosiglitazone metformin-pioglitazone"
)
HOSPITAL_CATEGORIES: Categories = {
    "race": _words("Caucasian AfricanAmerican Asian Hispanic Other"),
    "gender": ("Female", "Male", "Unknown/Invalid"),
    "age": tuple(f"[{low}-{low + 10})" for low in range(0, 100, 10)),
    "admission_type_id": tuple(map(str, range(1, 9))),
    "discharge_disposition_id": tuple(map(str, range(1, 31))),
    "admission_source_id": tuple(map(str, range(1, 27))),
    "max_glu_serum": _words("None Norm >200 >300"),
    "A1Cresult": _words("None Norm >7 >8"),
    **dict.fromkeys(_DRUGS, _DOSES),
    "change": ("No", "Ch"),
    "diabetesMed": ("No", "Yes"),
}
HOSPITAL_IGNORED = _words("encounter_id weight payer_code medical_specialty diag_1 diag_2 diag_3")

CALIFORNIA_COLUMNS = _words(
    "longitude latitude housing_median_age total_rooms total_bedrooms population households median_income"
)

WINE_RANGES: Ranges = {
    "fixed acidity": (4, 16),
    "volatile acidity": (0, 2),
    "citric acid": (0, 1),
    "residual sugar": (0, 20),
    "chlorides": (0, 0.7),
    "free sulfur dioxide": (0, 100),
    "total sulfur dioxide": (0, 300),
    "density": (0.985, 1.005),
    "pH": (2.5, 4.5),
    "sulphates": (0, 2),
    "alcohol": (8, 15),
}

_QUALIFICATIONS = "1 2 3 4 5 6 9 10 11 12 14 18 19 22 26 27 29 30 34 35 36 37 38 39 40 41 42 43 44"
_OCCUPATIONS = "0 1 2 3 4 5 6 7 8 9 10 90 99 122 123 131 132 134 141 143 144 151 152 153 171 175 192 193 194"

DROPOUT_CATEGORIES: Categories = {
    "Marital status": _words("1 2 3 4 5 6"),
    "Application mode": _words("1 2 5 7 10 15 16 17 18 26 27 39 42 43 44 51 53 57"),
    "Course": _words("33 171 8014 9003 9070 9085 9119 9130 9147 9238 9254 9500 9556 9670 9773 9853 9991"),
    "Previous qualification": _words("1 2 3 4 5 6 9 10 12 14 15 19 38 39 40 42 43"),
    "Nacionality": _words("1 2 6 11 13 14 17 21 22 24 25 26 32 41 62 100 101 103 105 108 109"),
    "Mother's qualification": _words(_QUALIFICATIONS),
    "Father's qualification": _words(f"{_QUALIFICATIONS} 13 20 25 31 33"),
    "Mother's occupation": _words(f"{_OCCUPATIONS} 125 173 191"),
    "Father's occupation": _words(
        f"{_OCCUPATIONS} 101 102 103 112 114 121 124 135 154 161 163 172 174 181 182 183 195"
    ),
}

_YES_OR_NO = (
    "Daytime/evening attendance",
    "Displaced",
    "Educational special needs",
    "Debtor",
    "Tuition fees up to date",
    "Gender",
    "Scholarship holder",
    "International",
)
_SEMESTER: Ranges = {
    "credited": (0, 30),
    "enrolled": (0, 30),
    "evaluations": (0, 50),
    "approved": (0, 30),
    "grade": (0, 20),
    "without evaluations": (0, 20),
}

DROPOUT_RANGES: Ranges = {
    **{name: (0.0, 1.0) for name in _YES_OR_NO},
    "Application order": (0, 9),
    "Previous qualification (grade)": (0, 200),
    "Admission grade": (0, 200),
    "Age at enrollment": (17, 70),
    "Unemployment rate": (0, 20),
    "Inflation rate": (-2, 5),
    "GDP": (-6, 6),
    **{
        f"Curricular units {semester} sem ({count})": limits
        for semester in ("1st", "2nd")
        for count, limits in _SEMESTER.items()
    },
}

_PERMISSIONS = {
    "android.permission": """
        GET_ACCOUNTS READ_PROFILE MANAGE_ACCOUNTS WRITE_SYNC_SETTINGS READ_EXTERNAL_STORAGE RECEIVE_SMS
        WRITE_SETTINGS DOWNLOAD_WITHOUT_NOTIFICATION GET_TASKS WRITE_EXTERNAL_STORAGE RECORD_AUDIO
        CHANGE_NETWORK_STATE CALL_PHONE WRITE_CONTACTS READ_PHONE_STATE MODIFY_AUDIO_SETTINGS
        ACCESS_LOCATION_EXTRA_COMMANDS INTERNET MOUNT_UNMOUNT_FILESYSTEMS AUTHENTICATE_ACCOUNTS
        ACCESS_WIFI_STATE FLASHLIGHT READ_APP_BADGE USE_CREDENTIALS CHANGE_CONFIGURATION READ_SYNC_SETTINGS
        BROADCAST_STICKY KILL_BACKGROUND_PROCESSES WRITE_CALENDAR SEND_SMS REQUEST_INSTALL_PACKAGES
        SET_WALLPAPER_HINTS SET_WALLPAPER RESTART_PACKAGES ACCESS_MOCK_LOCATION ACCESS_COARSE_LOCATION
        READ_LOGS SYSTEM_ALERT_WINDOW DISABLE_KEYGUARD USE_FINGERPRINT CHANGE_WIFI_STATE READ_CONTACTS
        READ_CALENDAR RECEIVE_BOOT_COMPLETED WAKE_LOCK ACCESS_FINE_LOCATION BLUETOOTH CAMERA
        FOREGROUND_SERVICE BLUETOOTH_ADMIN VIBRATE NFC RECEIVE_USER_PRESENT CLEAR_APP_CACHE
        ACCESS_NETWORK_STATE READ_SMS PROCESS_INCOMING_CALLS""",
    "android.permission.android.permission": "READ_PHONE_STATE",
    "com.amazon.device.messaging.permission": "RECEIVE",
    "com.android.alarm.permission": "SET_ALARM",
    "com.android.launcher.permission": "READ_SETTINGS INSTALL_SHORTCUT UNINSTALL_SHORTCUT",
    "com.android.vending": "BILLING CHECK_LICENSE",
    "com.anddoes.launcher.permission": "UPDATE_COUNT",
    "com.google.android.c2dm.permission": "RECEIVE",
    "com.google.android.finsky.permission": "BIND_GET_INSTALL_REFERRER_SERVICE",
    "com.google.android.gms.permission": "ACTIVITY_RECOGNITION",
    "com.google.android.providers.gsf.permission": "READ_GSERVICES",
    "com.htc.launcher.permission": "READ_SETTINGS UPDATE_SHORTCUT",
    "com.huawei.android.launcher.permission": "CHANGE_BADGE WRITE_SETTINGS READ_SETTINGS",
    "com.majeur.launcher.permission": "UPDATE_BADGE",
    "com.oppo.launcher.permission": "READ_SETTINGS WRITE_SETTINGS",
    "com.samsung.android.providers.context.permission": "WRITE_USE_APP_FEATURE_SURVEY",
    "com.sec.android.iap.permission": "BILLING",
    "com.sec.android.provider.badge.permission": "READ WRITE",
    "com.sonyericsson.home.permission": "BROADCAST_BADGE",
    "com.sonymobile.home.permission": "PROVIDER_INSERT_BADGE",
    "me.everything.badger.permission": "BADGE_COUNT_WRITE BADGE_COUNT_READ",
}

ANDROID_PERMISSIONS = tuple(f"{prefix}.{name}" for prefix, names in _PERMISSIONS.items() for name in names.split())
